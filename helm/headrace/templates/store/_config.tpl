{{- define "headrace.valkeyConfig" -}}
include /etc/valkey-password/valkey.conf
dir /data
appendonly yes
save ""
maxmemory-policy noeviction
{{- if .Values.tls.enabled }}
port 0
tls-port 6379
tls-cert-file /etc/valkey-tls/tls.crt
tls-key-file /etc/valkey-tls/tls.key
tls-ca-cert-file /etc/valkey-tls/ca.crt
tls-auth-clients no
{{- else }}
port 6379
{{- end }}
{{- end }}


{{- define "headrace.valkeyMounts" -}}
- name: config
  mountPath: /etc/valkey
  readOnly: true
- name: password
  mountPath: /etc/valkey-password
  readOnly: true
- name: data
  mountPath: /data
{{- if .Values.tls.enabled }}
- name: tls
  mountPath: /etc/valkey-tls
  readOnly: true
{{- end }}
{{- end }}

{{- define "headrace.valkeyVolumes" -}}
- name: config
  configMap:
    name: {{ (printf "%s-store" (include "headrace.fullname" .)) }}
- name: password
  secret:
    secretName: {{ include "headrace.storeSecret" . }}
    defaultMode: 0440
    items:
      - key: valkey.conf
        path: valkey.conf
{{- if .Values.tls.enabled }}
- name: tls
  secret:
    secretName: {{ include "headrace.tlsSecret" (dict "root" . "service" "store") }}
    defaultMode: 0440
{{- end }}
{{- if not .Values.store.valkey.persistence.enabled }}
- name: data
  emptyDir: {}
{{- end }}
{{- end }}
